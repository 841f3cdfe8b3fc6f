"""What a Spark user would write without Roost: the yardsticks that need Spark."""
