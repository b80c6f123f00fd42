"""What deserves another copy?"""
