"""vLLM as the sampler: servers in processes of their own, which get the policy's weights as files after each update.

Nothing here imports vLLM, whose versions of libraries are not those of this package.
"""
