"""Kernel and runtime: one planned step on one rank.

Importing this package before torch makes OpenMP's idle workers go to sleep after some ten microseconds instead of
spinning for milliseconds, unless the environment says otherwise. A step has hundreds of short parallel regions;
workers that spin between them take the cores from the HTTP front and the gateway beside them, and a step then waits
for its own workers to be scheduled. libgomp reads the variables once, when torch loads it.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
