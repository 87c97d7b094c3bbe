"""Where requests go: the data plane, the tasks that watch engines and router, leases, versions, models beside the
policy. Not here: samples and groups, HTTP formats of engines."""
