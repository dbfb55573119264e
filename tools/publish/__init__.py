"""Publishing to the Hugging Face Hub: what would change, whether it may, and then one commit for each branch."""
