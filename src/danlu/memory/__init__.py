"""What is kept, where, and how precisely: the memory management layer (显存管理层) of the step.

plan        settings; how many rows fit in one forward, by a closed formula
precision   which numbers are low and which are not, role by role
scale       the loss scale of fp16
rounding    weights and moments in bf16, moved in fp32 and rounded stochastically
ledger      where the bytes are: a forecast by closed formulas
tracker     the bytes that tensors really held
recompute   activations that are computed again instead of kept
shortage    memory has run out: how that is known, and what is said of it
offload     what is kept elsewhere than on the device
places      where that lies: the host's memory, or a file on a disk
states      optimiser states that are away between updates
activations what autograd keeps, waiting on the host for its backward
layer       the object that a step uses: fetch, policy, settle
"""
