"""The rollout manager: the service, its Ray actor and the driver's handle; engines of the policy, membership, weight
updates, colocation. Not here: generation and its data plane (rollout), the transfer of weights (weights)."""
