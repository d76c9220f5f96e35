"""The process that encodes chunks of rows for another one: `python -m trainwire_engine.data`."""

from trainwire_engine.data.process import serve

serve()
