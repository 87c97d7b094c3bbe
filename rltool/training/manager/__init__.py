"""The rollout manager: the service, its Ray actor and the driver's handle; engines of the policy, membership, weight
updates, colocation."""
