"""``pycomm trace``: one training step of all ranks as a timeline."""
