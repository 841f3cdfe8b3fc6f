"""The batch loop and what it needs: chains of stages, rounds, assembly, executors. No Spark."""
