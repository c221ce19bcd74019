"""Take models over from Hugging Face, and give them back."""
