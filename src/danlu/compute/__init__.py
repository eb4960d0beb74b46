"""When and where each piece runs: the compute scheduling layer (算力调度层) of the step.

mesh       settings; how the ranks are laid out
shard      weights cut over ranks, or copied, by FSDP2
zero       ZeRO's stages: what is gathered and what travels when, and the bytes that each holds
norms      norms layer by layer, whatever the layout
traffic    gathers and reductions that run beside the computation on CPUs
compile    blocks as compiled code: whether it pays, and one code for all
graphs     CUDA graphs of compiled blocks
layer      the object that a step uses: forward_backward, total, norm, agree
"""
