"""``python -m shardwright``, and torchrun's ``-m shardwright``."""

from shardwright.cli import main

main()
