"""The vocabulary that worker, engine and clients share: events, commands, config, codec and run folder."""
