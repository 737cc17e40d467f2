"""torch and peft: the policy, its steps, its checkpoints."""
