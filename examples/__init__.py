import alpaca_ppo  # noqa: F401  before torch: it sets how threads wait
