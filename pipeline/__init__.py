"""stepwell.pipeline"""
