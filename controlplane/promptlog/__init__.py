"""What tenants had kept of their requests: opt-in, redacted, bounded, and read under the eyes of an audit."""
