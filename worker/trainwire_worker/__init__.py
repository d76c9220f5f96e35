"""The process that a front end spawns: it owns the wire, the event log, the lock and the policies."""
