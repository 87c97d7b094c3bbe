"""One file per API: what a request asks; a reply as the API says it, whole or streamed; its errors. Pure."""
