"""Students whose adapters (LoRA) learn, on frozen weights.

lora_settings.py   rank, alpha, targets, and the folder for PEFT
lora_students.py   checks, loss card and identity
"""
