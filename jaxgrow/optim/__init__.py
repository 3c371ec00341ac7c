"""How are parameters updated: Muon, CompleteP, and frozen parameters?"""
