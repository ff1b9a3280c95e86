"""Training of the drafter: prompts, answers, features, training, export, evaluation, model card."""
