"""stepwell.codecs"""
