"""Parameter-efficient fine-tuning: how is a frozen model adapted with few trained parameters?"""
