"""shardwright: plan, train and prove how a transformer is split over many GPUs."""

__version__ = "0.1.0"
