"""Programs that feed exports to the real loaders of other tools, in the environment that scripts/install makes for them
(.venv-loaders). Each raises if a value differs from the run's, and prints what it saw as JSON."""
