"""What gradients become: the optimisation layer (优化算法层) of the step.

schedule   the learning rate of each update, as a share of its peak
groups     which weights decay and which do not, by their role
common     what every optimiser is told, and what it says of the state that it keeps
adamw      AdamW, and its settings
layer      the object that a step uses: clip, step, zero; its state by parameter name
"""
