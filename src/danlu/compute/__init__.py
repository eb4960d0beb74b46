"""When and where each piece runs: the compute scheduling layer (算力调度层) of the step.

mesh       settings; how the ranks are laid out
shard      weights cut over ranks, or copied, by FSDP2
layer      the object that a step uses: forward_backward, total, norm, agree
"""
