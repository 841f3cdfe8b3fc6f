"""The stages of a batch, each one kind of work; :mod:`roost.stages.contract` defines a stage."""
