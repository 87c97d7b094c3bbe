"""Where requests go: the data plane, the tasks that watch engines and router, leases, versions, models beside the
policy."""
