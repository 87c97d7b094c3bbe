"""Ray, placement, devices, GPUs of this host, engines that the run starts itself.

Not here: what ranks and the rollout manager do once they run.
"""
