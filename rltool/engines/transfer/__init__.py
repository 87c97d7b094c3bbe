"""What both ends of a weight transfer share: the wire contract with the vLLM plugin, NCCL and CUDA IPC through ctypes.

Needs torch alone; imported by the trainer and inside engines. Not here: routes, channels and policies of either end.
"""
