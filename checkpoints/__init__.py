"""From Hugging Face checkpoints to model directories and back: convert, verify, export.

Run as `python -m checkpoints.convert`, `checkpoints.verify`, `checkpoints.export`. The bundled model's files are in
`checkpoints/demo`.
"""
