"""The three stages of inference, joined: loading, prefill, decode. `load` is the way in."""
