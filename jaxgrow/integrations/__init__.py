"""How are models and checkpoints of other frameworks grown?"""
