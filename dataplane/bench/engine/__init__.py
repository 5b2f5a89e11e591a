"""`tidegate bench engine`: the engine over HTTP, alone and beside peers that a user would run on the same machine.

It knows the engine by its command line and its API only, and each peer likewise.
"""
