def validate(*a): return []
