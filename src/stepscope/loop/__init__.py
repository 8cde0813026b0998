"""What runs inside the process of a user's training script."""
