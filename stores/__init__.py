"""stepwell.stores"""
