"""What did one request go through, and who hears of it?"""
