"""One file per API: a request's body -> what is asked; a reply -> the API's body and stream; errors in its form. Pure."""
