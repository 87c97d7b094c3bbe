"""One file per API: what a request asks; a reply in the API's format, whole or streamed; its errors. Pure.

Not here: sessions, engines, the server.
"""
