"""Makes the quick-start base model: a Qwen-Image pipeline of 3 M parameters that writes three digits, weakly."""
