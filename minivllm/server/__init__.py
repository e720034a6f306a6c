"""An OpenAI-compatible HTTP server around `AsyncLLM`, with vLLM's routes, fields, flags and metrics.

Knows nothing of scheduling. What comes in is checked in `protocol`; `answers` makes of the engine's outputs what goes
out; `app` holds the routes, `metrics` what is counted, `serve` the process.
"""
