"""vLLM as the sampler: servers in other processes, which read the policy's weights from files after each update.

Nothing here imports vLLM, which needs other versions of libraries than this package.
"""
