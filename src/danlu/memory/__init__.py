"""What is kept, where, and how precisely: the memory management layer (显存管理层) of the step.

plan        settings; how many rows fit in one forward, by a closed formula
precision   which numbers are low and which are not
layer       the object that a step uses: fetch, policy
"""
