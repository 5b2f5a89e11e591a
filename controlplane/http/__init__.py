"""The HTTP/1.1 server of a control-plane process: one application, in the process's one event loop."""
