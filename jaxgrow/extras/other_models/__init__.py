"""How do models of others get axis names, and are the names correct?"""
