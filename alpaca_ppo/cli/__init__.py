"""The command `alpaca-ppo`: one module for each subcommand, imported when it is called."""
