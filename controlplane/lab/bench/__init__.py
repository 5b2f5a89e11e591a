"""Benches of the control plane's processes, each beside a control that must show no gain."""
