"""Training of the bundled demonstration model: corpus, model, training loop and export, each in its own file."""
