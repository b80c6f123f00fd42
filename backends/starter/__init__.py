"""What does somebody begin with who has no checkout?"""
