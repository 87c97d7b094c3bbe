"""sglang-router in front of the engines: starting it, and its worker list.

What sglang-router 0.3.2 does with a key (found by trying it; tests/contract/test_router_*.py holds it):

- Started with `api_key`, it demands that key as a bearer token (401 otherwise) on /generate, /v1/completions and the
  other generating routes, on /workers in every form, /flush_cache and /get_loads.
- It demands no key on /health, /liveness, /readiness, /v1/models, /get_server_info, /get_model_info and
  /engine_metrics. They show how many workers there are and what the model is called; /engine_metrics asks every
  worker's /metrics without a key, which a guarded engine refuses. The Prometheus port has no key either. All are bound
  to loopback unless set otherwise.
- On /generate it forwards the *client's* Authorization header to the worker, not the worker's own key. So clients,
  router and all engines must share one key.
- On its own requests to a worker (/server_info, /model_info, /flush_cache, the later health checks) it presents the
  `api_key` given with that worker in POST /workers; without it, a guarded worker is registered as model "unknown"
  without metadata. The first look at a worker's /health, at its registration, comes without a key, so a guard has to
  leave that route open.
- Worker URLs given on its command line would have to be up at that moment, with the key in argv or in a Python call;
  POST /workers serves both cases.
"""
